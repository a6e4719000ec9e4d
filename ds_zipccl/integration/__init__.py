"""For whom: everything that knows DeepSpeed or FSDP2.

``autoload`` -> ``hooks`` -> ``backend`` -> ``start_up`` -> ``job``: each imports the next, none the one before. ``fsdp`` begins at
``start_up``.
"""

# The import of torch calls the autoload entry point. It comes first: modules of this folder import DeepSpeed, and the finder of autoload
# must see that.
import torch  # noqa: F401
