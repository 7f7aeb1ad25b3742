"""A Ray cluster, and the part of it that an engine takes."""

import math
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from dinfer.engine.base_llm import KV_MEMORY_FRACTION
from dinfer.errors import RequestError
from dinfer.resources import available_memory

REACH = 10.0
"""Seconds in which a cluster must answer."""


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """The module ray, connected to the cluster at an address, or without one to that of the
    variable RAY_ADDRESS, or else to one that is started on this machine and ends with the context.
    A process that is connected stays so, whatever the address. Raises RequestError where there is
    none, or no Ray.
    """
    # A cluster of our own tells nobody that it is used, unless the user wants that.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ModuleNotFoundError as error:
        text = "Several engines need Ray; install the extra: pip install 'dinfer[ray]'."
        raise RequestError(text) from error
    if ray.is_initialized():
        yield ray
        return
    own = {"include_dashboard": False} if address is None else {}
    try:
        if address is not None:
            _reach(address)
        # What engines print is in Ray's own logs.
        ray.init(address=address, log_to_driver=False, **own)
    except (OSError, ValueError) as error:
        raise RequestError(f"There is no Ray cluster at {address!r}: {error}.") from error
    try:
        with redirect_stdout(sys.stderr):  # standard output is for results, Ray's remarks are not
            yield ray
    finally:
        ray.shutdown()


def _reach(address: str) -> None:
    """Raises OSError where nobody listens there: Ray would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), REACH).close()


def share(ray: Any, engines: int, device: str) -> dict[str, float]:
    """What an engine takes of the cluster, as options of an actor: a GPU where there are any and
    the device is not the CPU, else an equal part of the CPUs. Raises RequestError where it has
    fewer of them than engines.
    """
    found = ray.cluster_resources()
    kind = "CPU" if device == "cpu" or not found.get("GPU") else "GPU"
    if found.get(kind, 0) < engines:
        raise RequestError(
            f"{engines} engines need a {kind} each; the Ray cluster has {found.get(kind, 0):.0f}."
        )
    if kind == "GPU":
        return {"num_gpus": 1}
    return {"num_cpus": int(found["CPU"]) // engines}


def engines_on_a_machine(ray: Any, engines: int) -> int:
    """How many of so many equal engines come to lie on one machine of the cluster."""
    machines: int = sum(node["Alive"] for node in ray.nodes())
    return math.ceil(engines / max(1, machines))


def with_kv_memory(options: dict[str, Any], neighbours: int) -> dict[str, Any]:
    """Options of an engine on a CPU that shares the machine's memory with others, itself among
    `neighbours`: each would take as much as is meant for one.
    """
    if options.get("kv_memory") is not None:
        return options
    part = KV_MEMORY_FRACTION * available_memory() / neighbours
    return options | {"kv_memory": part / 2**30}
