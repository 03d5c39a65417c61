"""Create the application from a policy."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headgate import ConfigError
from headgate.policy import AsyncLivePolicy, ServerPolicy, load_policy
from headgate_server.app import App, Companion
from headgate_server.metrics import ServerMetrics
from headgate_server.replay.recording import DecisionRecorder
from headgate_server.snapshots import SharedFolder
from headgate_server.statistics import Demo, Statistics

if TYPE_CHECKING:
    from headgate_server.envoy.service import EnvoyService


def make_app(
    live: AsyncLivePolicy,
    *,
    statistics: Statistics | None = None,
    metrics: ServerMetrics | None = None,
    demo: Demo | None = None,
    companions: Sequence[Companion] = (),
) -> App:
    """Return the ASGI application of a policy; it closes the policy's stores when it shuts down.

    Args:
        live: The limiters. They are watched and reloaded if they came from a file.
        statistics: The figures of `/v1/events`. It must be one of the policy's hooks, as `open_app` ensures.
        metrics: The metrics of `/metrics`, whose hooks must be among the policy's hooks; `None` for no metrics.
        demo: The demo that the dashboard shows and controls.
        companions: Other servers, started and stopped with the application.
    """
    return App(live, Statistics() if statistics is None else statistics, metrics, demo, companions)


def recorders(server: ServerPolicy) -> list[DecisionRecorder]:
    """Return the recorder of decisions, if the policy has one.

    Raises:
        ConfigError: The file cannot be written.
    """
    if server.record is None:
        return []
    hashed = server.record_keys == "hashed"
    return [DecisionRecorder(server.record, max_bytes=server.record_bytes, hash_keys=hashed)]


def open_app(
    config: str | Path,
    *,
    environment: Mapping[str, str] | None = None,
    shared_folder: SharedFolder | None = None,
    demo: Demo | None = None,
    envoy_address: str | None = None,
) -> App:
    """Return the ASGI application of a policy file, with figures and metrics.

    Args:
        config: The file.
        environment: Variables that replace single values; by default those of the process.
        shared_folder: The folder in which the workers of a server share their figures.
        demo: The demo that the dashboard shows and controls.
        envoy_address: The address on which Envoy's rate-limit service listens; `None` without it.

    Raises:
        PolicyError: The file is not valid.
        ConfigError: The recording cannot be written.
    """
    statistics, metrics = Statistics(shared_folder), ServerMetrics()
    environment = os.environ if environment is None else environment
    live = AsyncLivePolicy.from_file(
        config,
        environment,
        hooks=[statistics, metrics.hook, *recorders(load_policy(config, environment).server)],
        shadow_hooks=[metrics.shadow_hook],
    )
    if live.policy.server.history is not None:
        statistics.history.keep_in(Path(config).parent / live.policy.server.history)
    companions = () if envoy_address is None else (envoy_service()(live, envoy_address),)
    return make_app(live, statistics=statistics, metrics=metrics, demo=demo, companions=companions)


def envoy_service() -> type[EnvoyService]:
    """Return the class of Envoy's rate-limit service, whose packages are optional.

    Raises:
        ConfigError: A package is not installed.
    """
    try:
        from headgate_server.envoy.service import EnvoyService
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the policy has [envoy], which needs {error.name}: pip install 'headgate-server[envoy]'"
        ) from error
    return EnvoyService
