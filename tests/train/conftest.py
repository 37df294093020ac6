import torch
from hypothesis import settings

# Examples share two cores with whatever else runs; how long one takes says nothing.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

# Ranks are threads here. Each would bring its own team of threads, which spin while they wait for each other.
torch.set_num_threads(1)
