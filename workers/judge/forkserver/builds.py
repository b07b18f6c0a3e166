"""Whether a place keeps builds: only where no sealed process can reach them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.judge.host import toolchain
from workers.judge.host.artifacts import Store
from workers.judge.sandbox import reach
from workers.judge.slot_config import SlotConfig


def open_store(slot: SlotConfig, isolation: dict[str, Any], environment: Mapping[str, str]) -> Store | None:
    """Return the store of builds that the place's judges open; None without one.

    The seal must keep it closed: by a uid of the candidates' own, as a folder is its owner's alone, or by Landlock, and
    then a folder must lie outside of all that sealed processes may read.

    Args:
        slot: the place.
        isolation: what the seal of this host holds.
        environment: what sealed processes see.

    Raises:
        ConfigError: no library for the store's location is installed.
    """
    if not slot.build_store:
        return None
    readable = "://" not in slot.build_store and reach.is_readable(Path(slot.build_store))
    if isolation["own_uid"] is not True and (isolation["files"] is not True or readable):
        return None
    store = Store(slot.build_store, slot.build_store_bytes, toolchain.fingerprint(environment))
    store.preload()
    return store
