"""Send the metrics of `prometheus.py` once to an OpenTelemetry collector over HTTP, with the SDK's own exporter.

The standard variables set the address, the headers, the timeout and the labels: OTEL_EXPORTER_OTLP_ENDPOINT,
OTEL_EXPORTER_OTLP_HEADERS, OTEL_EXPORTER_OTLP_TIMEOUT, OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry

from ckpt_tasks.errors import ConfigError, StoreError


def push_metrics(registry: CollectorRegistry) -> None:
    """Send each sample of a counter as a sum, and every other sample as a gauge.

    Raises ConfigError if the packages are not installed, and StoreError if the collector does not take the samples.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricExportResult
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed", hint="Run pip install 'ckpt-tasks[otel]'.") from error
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    meter = provider.get_meter("ckpt-tasks")
    for metric in registry.collect():
        observe = partial(_observed, metric)
        if metric.type == "counter":
            meter.create_observable_counter(metric.name, [observe], description=metric.documentation)
        else:
            meter.create_observable_gauge(metric.name, [observe], description=metric.documentation)
    data = reader.get_metrics_data()
    if data is None or OTLPMetricExporter().export(data) is not MetricExportResult.SUCCESS:
        raise StoreError(
            "the OpenTelemetry collector has not taken the metrics",
            hint="The lines before this one say why. Set OTEL_EXPORTER_OTLP_ENDPOINT, for example http://host:4318.",
        )
    provider.shutdown()


def _observed(metric: Any, options: object) -> Any:
    from opentelemetry.metrics import Observation

    return [Observation(sample.value, sample.labels) for sample in metric.samples]
