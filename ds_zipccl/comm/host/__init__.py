"""The engine of groups that exchange messages of pairs of ranks: how frames travel between the ranks. Collectives get flat contiguous
tensors of one dtype on one device, in inference mode, and block until the outputs are written."""
