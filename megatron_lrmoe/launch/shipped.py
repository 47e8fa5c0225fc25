"""Where the patches, configs and scripts lie: at the top of a checkout of this project, inside an installed wheel."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
NAMES = ("patches", "configs", "scripts")


def folder(name: str) -> Path:
    """A folder that travels with the plugin.

    Args:
        name: one of ``NAMES``.

    Raises:
        ValueError: neither the package nor the checkout around it has the folder.
    """
    # The wheel holds them under shipped/ (pyproject.toml); an editable install has the checkout's own.
    places = (PACKAGE / "shipped" / name, PACKAGE.parent / name)
    for place in places:
        if place.is_dir():
            return place
    raise ValueError(f"{name}: found none of {', '.join(map(str, places))}, expected one of these folders")
