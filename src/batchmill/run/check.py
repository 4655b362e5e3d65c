"""What a run needs, looked at before anything is started."""

from __future__ import annotations

from batchmill.cli import export
from batchmill.cli.config import Settings
from batchmill.errors import ConfigError
from batchmill.extras import require_extra

_OF_A_SPOOL = ("segment_rows", "unread_warning_mb", "unread_critical_mb", "unread_critical_plus_mb")


def check(settings: Settings, *, demo: bool) -> None:
    """Find out what is missing before anything is started."""
    from batchmill.spark import find_java

    require_extra("the pipeline", "spark", "pyspark")
    find_java()
    if demo and settings["tls_cert"]:
        raise ConfigError("--demo", "with tls_cert", "without TLS: the demo sends plain HTTP")
    _check_kafka(settings)
    for each in (*settings["export_to"], settings["export_traces"], settings["export_logs"]):
        if each is not None:
            export.check_extra(each)
    if settings["token"] and settings["token_file"]:
        raise ConfigError("token_file", settings["token_file"], "left out where there is a token")
    if not (settings["token"] or settings["token_file"] or settings["tls_client_ca"]):
        from batchmill.http import Access

        Access().check_bind(settings["bind"], settings["insecure"])


def _check_kafka(settings: Settings) -> None:
    from batchmill.kafka import java_options, read_options

    options: dict[str, str] = {}
    if (file := settings.path("kafka_config")) is not None:
        try:
            options = read_options(file)
        except OSError as error:
            what = f"a file that can be read ({error.strerror})"
            raise ConfigError("kafka_config", str(file), what) from None
    if not settings["kafka"]:
        return
    java_options(options)  # the pipeline reads with that client
    require_extra("Kafka", "kafka", "confluent_kafka")
    for name in _OF_A_SPOOL:
        if settings.chosen[name].origin != "default":
            allowed = "left out with kafka: a topic has no segments, and its retention bounds it"
            raise ConfigError(name, settings[name], allowed)
