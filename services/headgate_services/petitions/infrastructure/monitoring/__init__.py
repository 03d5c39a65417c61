"""What operators watch."""

from headgate_services.petitions.infrastructure.monitoring.metrics import MetricsCollector

__all__ = ["MetricsCollector"]
