"""Options that several commands share: where the pipeline's parts are, and its settings."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from batchmill.cli.sources import add_sources_option, import_sources

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LONGEST_S = 7 * 86_400


def add_pipeline_options(parser: argparse.ArgumentParser) -> None:
    """Everything that makes a pipeline."""
    parts = parser.add_argument_group("its parts")
    parts.add_argument(
        "--oal",
        action="append",
        metavar="PATH",
        help="a script, or a folder of *.oal; may be repeated (default: the core metrics)",
    )
    add_sources_option(parts)
    parts.add_argument("--spool", default="spool", metavar="DIR", help="default: %(default)s")
    parts.add_argument(
        "--source",
        metavar="URL",
        help="read spans from kafka://HOST:PORT[,HOST:PORT]/TOPIC, and from no spool",
    )
    add_kafka_option(parts)
    parts.add_argument(
        "--skip-lost",
        action="store_true",
        help="go on when the topic no longer has messages that were not read",
    )
    parts.add_argument(
        "--store",
        default="sqlite:///metrics.db",
        metavar="URL",
        help="sqlite:///FILE or postgresql://… (default: %(default)s)",
    )
    parts.add_argument(
        "--checkpoint", default="checkpoint", metavar="DIR", help="default: %(default)s"
    )
    parts.add_argument(
        "--quarantine", metavar="DIR", help="for what does not fit (default: beside the spool)"
    )
    parts.add_argument("--name", default="main", help="of the stream (default: %(default)s)")
    spark = parser.add_argument_group("Spark")
    spark.add_argument(
        "--master", default="local[*]", help="such as spark://host:7077 (default: %(default)s)"
    )
    spark.add_argument(
        "--conf",
        action="append",
        default=[],
        type=_pair,
        metavar="KEY=VALUE",
        help="a Spark setting; may be repeated",
    )
    spark.add_argument(
        "--batch-mb",
        type=_whole(1),
        metavar="N",
        help="read at most that many MiB in one micro-batch (default: 128)",
    )
    spark.add_argument(
        "--batch-files", type=_whole(1), metavar="N", help="read at most that many segments in one"
    )
    parts.add_argument(
        "--outbox",
        action="store_true",
        help="put what each commit changes down for exporters: batchmill export",
    )
    parts.add_argument(
        "--outbox-mb",
        type=_whole(1),
        metavar="N",
        help="beyond so many MiB the oldest of it go (default: 1024)",
    )
    meaning = parser.add_argument_group("what counts")
    meaning.add_argument(
        "--apdex",
        action="append",
        default=[],
        type=_pair,
        metavar="SERVICE=MS",
        help="the apdex threshold of a service (default: 500); may be repeated",
    )
    meaning.add_argument("--ttl-days", type=_whole(1), metavar="N", help="default: 7")
    meaning.add_argument("--top-n", type=_whole(1), metavar="N", help="default: 50")
    meaning.add_argument(
        "--span-wait", type=_whole(0), metavar="S", help="for a span's partner (default: 300)"
    )
    meaning.add_argument(
        "--dedup",
        type=_duration,
        metavar="TIME",
        help="count a span once that is delivered again within that time, such as 10m",
    )
    meaning.add_argument("--slow-database", metavar="MS", help="default:200,mongodb:100")
    meaning.add_argument("--slow-cache", metavar="MS", help="default:20,redis:10")


def add_kafka_option(parser: Any) -> None:
    """Where it is said how a broker is talked to; spelled alike for all who do."""
    parser.add_argument(
        "--kafka-config",
        type=Path,
        metavar="FILE",
        help="settings of librdkafka for kafka://…, NAME=VALUE a line: TLS, user and password",
    )


def kafka_options(given: argparse.Namespace) -> dict[str, str]:
    """What the file of :func:`add_kafka_option` says; nothing, if there is none."""
    if given.kafka_config is None:
        return {}
    from batchmill.kafka import read_options

    return read_options(given.kafka_config)


def pipeline_arguments(given: argparse.Namespace) -> dict[str, Any]:
    """What :class:`batchmill.spark.Pipeline` is to be made with; imports the event types."""
    from batchmill.oal import core_script
    from batchmill.outbox import OutboxSettings
    from batchmill.spark import PipelineSettings

    import_sources(given.sources)
    settings = {
        "max_batch_bytes": None if given.batch_mb is None else given.batch_mb * 2**20,
        "max_batch_files": given.batch_files,
        "ttl_days": given.ttl_days,
        "top_n": given.top_n,
        "span_wait_s": given.span_wait,
        "slow_database_ms": given.slow_database,
        "slow_cache_ms": given.slow_cache,
        "skip_lost": given.skip_lost,
    }
    apdex = {service: _milliseconds(service, text) for service, text in given.apdex}
    return {
        "oal": given.oal or core_script(),
        "spool": None if given.source else given.spool,
        "source": given.source,
        "kafka_options": kafka_options(given),
        "store": given.store,
        "checkpoint": given.checkpoint,
        "quarantine": given.quarantine,
        "name": given.name,
        "master": given.master,
        "spark_conf": dict(given.conf),
        "dedup_s": given.dedup,
        "outbox": given.outbox
        and OutboxSettings(**({"max_bytes": given.outbox_mb * 2**20} if given.outbox_mb else {})),
        "remove_read": getattr(given, "remove_read", False),
        "settings": PipelineSettings(
            apdex_ms=apdex, **{key: each for key, each in settings.items() if each is not None}
        ),
    }


def _milliseconds(service: str, text: str) -> Any:
    # What is no number is refused by the settings, which say what they take.
    return int(text) if text.isdecimal() else f"{service}={text}"


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not valid: it must be NAME=VALUE")
    return key, value


def _duration(text: str) -> float:
    """Seconds, from a number with a unit; without one it is seconds."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "s")
    seconds = int(number) * _UNITS[unit] if number.isascii() and number.isdecimal() else 0
    if not 1 <= seconds <= _LONGEST_S:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not valid: it must be a time from 1s up to 7d, such as 90s, 10m or 1h"
        )
    return float(seconds)


def _whole(least: int) -> Any:
    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not valid: it must be a whole number, {least} or more"
            )
        return int(text)

    return read
