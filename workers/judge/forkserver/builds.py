"""The store of builds of a slot. It is used only if no sealed process can access it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.judge.host import toolchain
from workers.judge.host.artifacts import Store
from workers.judge.sandbox import reach
from workers.judge.slot_config import SlotConfig


def open_store(slot: SlotConfig, isolation: dict[str, Any], environment: Mapping[str, str]) -> Store | None:
    """Open the store of builds for the slot's judges. Return None if the slot has none, or if access is not prevented.

    The seal must prevent access by sealed processes. A separate uid does so, because only its owner can open the
    folder. Landlock does so if the folder is outside of the readable paths.

    Args:
        isolation: report of the seal's measures on this host.
        environment: environment variables of sealed processes.

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
