"""One PyTorch job across an Ubuntu box with an NVIDIA card and the Macs beside it."""

__version__ = "0.1.0"
