"""Observability: metrics, logs, and redaction of credentials.

- `headgate.observe.logs`: LogHook, one line per refusal
- `headgate.observe.prometheus`: PrometheusHook, for prometheus_client
- `headgate.observe.opentelemetry`: OpenTelemetryHook, metrics and spans
"""

from headgate.hooks import Call, Hook
from headgate.observe.logs import LogHook
from headgate.observe.redaction import MASK, RedactingFilter, redact
from headgate.observe.top import TopKeys

__all__ = ["MASK", "Call", "Hook", "LogHook", "RedactingFilter", "TopKeys", "redact"]
