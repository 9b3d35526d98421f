"""Reading MLIR locations."""

from __future__ import annotations

from typing import Any

from .errors import Place


def places_of(location: Any) -> tuple[tuple[str, int, int], ...]:
    """The file positions (file, line, column) of an MLIR location, the innermost first. Empty where it has none."""
    if location.is_a_callsite():
        return places_of(location.callee) + places_of(location.caller)
    if location.is_a_file():
        return ((location.filename, location.start_line, location.start_col),)
    if location.is_a_name():
        return places_of(location.child_loc)
    if location.is_a_fused():
        return next((found for each in location.locations if (found := places_of(each))), ())
    return ()


def shown_places(location: Any, function: str) -> tuple[Place, ...]:
    """The same as an error shows them, the kernel's own line first. `function` names what the lines belong to."""
    import linecache

    found: list[Place] = []
    for file, line, column in reversed(places_of(location)):
        text = linecache.getline(file, line).rstrip("\n")
        if text:
            found.append(Place(file, line, column - 1, len(text), function, text))
    return tuple(found)
