"""The enumeration that transformers maps to Pillow's when it is imported."""

import enum


class InterpolationMode(enum.Enum):
    """torchvision's names and values."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"
