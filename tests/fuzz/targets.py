"""All targets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.fuzz import of_decode, of_descriptors, of_settings, of_state, of_values, of_wire

if TYPE_CHECKING:
    from tests.fuzz.engine import Target

TARGETS: tuple[Target, ...] = (
    *of_wire.TARGETS,
    *of_decode.TARGETS,
    *of_descriptors.TARGETS,
    *of_values.TARGETS,
    *of_state.TARGETS,
    *of_settings.TARGETS,
)


def target_of(name: str) -> Target:
    return next(target for target in TARGETS if target.name == name)
