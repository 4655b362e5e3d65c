"""Senders of metrics: OTLP over gRPC and HTTP, Kafka."""
