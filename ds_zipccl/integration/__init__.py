"""For whom: everything that knows DeepSpeed.

``autoload`` -> ``hooks`` -> ``backend`` -> ``job``: each imports the next, none the one before.
"""

# The import of torch calls the autoload entry point. It comes first: modules of this folder import DeepSpeed, and the finder of autoload
# must see that.
import torch  # noqa: F401
