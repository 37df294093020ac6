from hypothesis import settings

# Examples share two cores with whatever else runs; how long one takes says nothing.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
