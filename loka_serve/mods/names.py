"""The mods by name, in the order of their application. Imports no torch: command lines read it."""

from __future__ import annotations

RECORD_VERSION = 1
"""Of the record that a bundle keeps of its mods."""
EXACT_MODS = ("fuse_projections", "fold_biases", "fold_norm_gains", "smooth", "pad_widths", "layout")
"""Leave the function as it is: bit for bit, or where sums run in another order to float32 rounding."""
OFFERED_MODS = ("fold_whole_norm_gains",)
"""Round something once more, so the build applies them only where asked."""
MOD_NAMES = ("fuse_projections", "fold_biases", "fold_norm_gains", "fold_whole_norm_gains", *EXACT_MODS[3:])
EXPECTED = f"exact, none, all, or names out of {', '.join(MOD_NAMES)} with commas between"


def parse_mods(text: str) -> tuple[str, ...]:
    """`exact`, `none`, `all`, or `name,name`: names in order of application. Raises ValueError."""
    words = [word.strip().lower() for word in text.split(",")]
    if words in (["exact"], ["none"], ["all"]):
        return {"exact": EXACT_MODS, "none": (), "all": MOD_NAMES}[words[0]]
    if not set(words) <= set(MOD_NAMES) or len(set(words)) != len(words):
        raise ValueError(text)
    return tuple(name for name in MOD_NAMES if name in words)


def applied_mods(record: object) -> list[str]:
    """Names of the mods that a bundle's record says changed something; none for a bundle from before there were mods.

    Raises:
        ValueError: another version or form.
    """
    if record is None:
        return []
    if not isinstance(record, dict) or record.get("version") != RECORD_VERSION:
        raise ValueError(f"expected an object of version {RECORD_VERSION}")
    return [mod["name"] for mod in record["applied"]]
