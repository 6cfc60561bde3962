"""lampejo: open language models several times faster, with exactly the same output."""

__version__ = "0.1.0"
