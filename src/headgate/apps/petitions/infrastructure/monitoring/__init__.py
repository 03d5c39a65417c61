"""What operators watch."""

from headgate.apps.petitions.infrastructure.monitoring.metrics import MetricsCollector

__all__ = ["MetricsCollector"]
