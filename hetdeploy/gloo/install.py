"""Entry point of the group ``torch.backends``: torch calls ``autoload`` at the end of its own import."""

from __future__ import annotations


def autoload() -> None:
    """Do nothing where the launcher did not ask for a bridge."""
