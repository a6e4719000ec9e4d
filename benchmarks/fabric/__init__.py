"""A real DeepSpeed engine as rank 0 of many, over a network that is modelled: ``bench train --fabric``."""
