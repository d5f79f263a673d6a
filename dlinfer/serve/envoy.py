"""Writes the files that configure Envoy as the router in front of the replicas.

Envoy passes requests and answers on unchanged, for any path, and:

- sends all turns of a conversation to one replica, unless that replica has far more to do than the others;
- repeats a request at another replica if a replica dies before it answers;
- closes the connection of a stream if the stream's replica dies, so that no client takes the stream for complete.

A separate file lists the replicas. Envoy reads this file again when it is replaced, and keeps all connections.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ONE_SERVER_PATHS = (
    "/abort_request",
    "/destroy_weights_update_group",
    "/distserve",
    "/init_weights_update_group",
    "/is_sleeping",
    "/sleep",
    "/terminate",
    "/update_weights",
    "/update_weights_from_distributed",
    "/update_weights_from_ipc",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/wakeup",
)
"""Paths of LMDeploy's server, with everything below them (`/distserve/…`), that change or query a single server.

The router would send them to an arbitrary server.
"""

_BODY_BYTES = 64 << 20
"""The most bytes of a request. Envoy keeps each request until it is answered, so that Envoy can send it again."""

# A conversation moves to another replica if its own replica has more unfinished requests than this percentage of the
# average.
_MOST_LOAD_PERCENT = 200

# How often a request is repeated at other replicas after its replica dies. The request itself may kill replicas.
_RETRIES = 2

_TYPE = "type.googleapis.com/envoy"
_REPLICAS = "replicas"
_CONTROL = "control"


def write_bootstrap(folder: Path, listen: tuple[str, int], control: str) -> Path:
    """Write the file that Envoy reads at its start, and return the file's path.

    folder: the folder to write to. The list of replicas (``write_replicas``) and Envoy's admin socket are there, too.
    listen: host and port for clients. control: the URL of the supervisor's own server.
    """
    config = {
        "node": {"id": "dlinfer", "cluster": "dlinfer"},
        "admin": {"address": {"pipe": {"path": str(admin_socket(folder)), "mode": 0o600}}},
        "static_resources": {
            "listeners": [_listener(listen)],
            "clusters": [_replicas_cluster(folder), _cluster(_CONTROL, [control])],
        },
    }
    path = folder / "envoy.json"
    path.write_text(json.dumps(config, indent=1))
    return path


def write_replicas(folder: Path, urls: Iterable[str]) -> None:
    """Replace the list of replicas that get new requests.

    Replicas that leave the list finish their running requests.
    """
    assignment = {"@type": f"{_TYPE}.config.endpoint.v3.ClusterLoadAssignment", **_endpoints(_REPLICAS, urls)}
    draft = folder / "replicas.draft"
    draft.write_text(json.dumps({"resources": [assignment]}))
    os.replace(draft, _replicas_file(folder))  # Envoy notices files that are moved into the folder


def admin_socket(folder: Path) -> Path:
    """Return the path of the socket for Envoy's administration interface."""
    return folder / "admin.sock"


def _replicas_file(folder: Path) -> Path:
    return folder / "replicas.json"


def _listener(listen: tuple[str, int]) -> dict[str, Any]:
    host, port = listen
    manager = {
        "@type": f"{_TYPE}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "router",
        "stream_idle_timeout": "0s",  # no limit: an answer may pause for any time
        "drain_timeout": "1s",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": _routes()}]},
        "http_filters": [
            _filter("lua", {"default_source_code": {"inline_string": _lua()}}),
            _filter("router", {}),
        ],
        "local_reply_config": {
            "body_format": {
                "json_format": {
                    "object": "error",
                    "type": "router_error",
                    "message": "%LOCAL_REPLY_BODY%",
                    "code": "%RESPONSE_CODE%",
                }
            }
        },
    }
    return {
        "name": "clients",
        "address": _address(host, port),
        "per_connection_buffer_limit_bytes": _BODY_BYTES,
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }


def _routes() -> list[dict[str, Any]]:
    refused = {
        "status": 501,
        "body": {
            "inline_string": "This path changes or asks a single server. Call that server, not the router."
        },
    }
    routes: list[dict[str, Any]] = [
        {"match": {"path_separated_prefix": path}, "direct_response": refused} for path in ONE_SERVER_PATHS
    ]
    own = [{"path": "/metrics"}, {"path_separated_prefix": "/dlinfer"}]
    routes += [{"match": match, "route": {"cluster": _CONTROL, "timeout": "30s"}} for match in own]
    to_replicas = {
        "cluster": _REPLICAS,
        "timeout": "0s",
        "hash_policy": [{"header": {"header_name": "x-dlinfer-prefix"}}],
        "retry_policy": {
            "retry_on": "reset,connect-failure,refused-stream",
            "num_retries": _RETRIES,
            "retry_host_predicate": [
                {
                    "name": "envoy.retry_host_predicates.previous_hosts",
                    "typed_config": {
                        "@type": f"{_TYPE}.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
                    },
                }
            ],
            "host_selection_retry_max_attempts": 8,
            "retry_back_off": {"base_interval": "0.05s", "max_interval": "1s"},
        },
    }
    return [*routes, {"match": {"prefix": "/"}, "route": to_replicas}]


def _replicas_cluster(folder: Path) -> dict[str, Any]:
    source = {"path": str(_replicas_file(folder)), "watched_directory": {"path": str(folder)}}
    return _cluster(_REPLICAS) | {
        "type": "EDS",
        "eds_cluster_config": {
            "eds_config": {"path_config_source": source, "resource_api_version": "V3"},
        },
        "lb_policy": "RING_HASH",
        "common_lb_config": {
            # If no replica is healthy, Envoy uses all listed ones: the supervisor lists only those that answer.
            "healthy_panic_threshold": {"value": 1.0},
            "update_merge_window": "0s",  # a healthy replica gets requests at once
            "consistent_hashing_lb_config": {"hash_balance_factor": _MOST_LOAD_PERCENT},
        },
        "ignore_health_on_host_removal": True,
        "health_checks": [
            {
                "timeout": "10s",
                "interval": "2s",
                "no_traffic_interval": "2s",
                "unhealthy_threshold": 3,
                "healthy_threshold": 1,
                "http_health_check": {"path": "/health"},
            }
        ],
    }


def _cluster(name: str, urls: Iterable[str] = ()) -> dict[str, Any]:
    limits = {"max_connections": 50_000, "max_pending_requests": 50_000, "max_requests": 50_000}
    return {
        "name": name,
        "connect_timeout": "5s",
        "load_assignment": _endpoints(name, urls),
        "circuit_breakers": {"thresholds": [limits | {"max_retries": 50_000}]},
        "per_connection_buffer_limit_bytes": 1 << 20,
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": f"{_TYPE}.extensions.upstreams.http.v3.HttpProtocolOptions",
                # Less than the 5 seconds after which uvicorn closes an idle connection.
                "common_http_protocol_options": {"idle_timeout": "4s"},
                "explicit_http_config": {"http_protocol_options": {}},
            }
        },
    }


def _endpoints(name: str, urls: Iterable[str]) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": _address(*host_and_port(url))}} for url in urls]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def host_and_port(url: str) -> tuple[str, int]:
    """Return host and port of ``http://HOST:PORT``."""
    host, _, port = url.removeprefix("http://").rstrip("/").rpartition(":")
    return host.strip("[]"), int(port)


def _filter(name: str, config: dict[str, Any]) -> dict[str, Any]:
    kind = {"lua": "Lua", "router": "Router"}[name]
    config = {"@type": f"{_TYPE}.extensions.filters.http.{name}.v3.{kind}"} | config
    return {"name": f"envoy.filters.http.{name}", "typed_config": config}


def _lua() -> str:
    return Path(__file__).with_name("affinity.lua").read_text()
