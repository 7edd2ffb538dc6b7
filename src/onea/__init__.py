"""Learn new classes in batches of any size with one adapter on a frozen vision transformer."""

from onea.version import __version__

__all__ = ["__version__"]
