"""A real Kafka broker for tests: one KRaft node on the loopback, in a temporary folder.

A test that takes the fixture ``kafka`` gets it running, whatever the test before did to it: all of
them share one, since it takes seconds to start. ``private_broker()`` is one that nobody else uses.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.kit.jvm import QUICK, jars, jars_missing, java_missing
from tests.kit.processes import free_ports, pause_process
from tests.kit.threads import PATIENCE_S, until

if TYPE_CHECKING:
    from confluent_kafka import Consumer
    from confluent_kafka.admin import AdminClient

    from batchmill.spool import SpanBatch

STOP_S = 30.0

_PROPERTIES = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
controller.listener.names=CONTROLLER
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller},LOGIN://127.0.0.1:{login}
advertised.listeners=PLAINTEXT://127.0.0.1:{port},LOGIN://127.0.0.1:{login}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,LOGIN:{protocol}
sasl.enabled.mechanisms=PLAIN
listener.name.login.plain.sasl.jaas.config={module} required user_{user}="{password}";
log.dirs={folder}/data
auto.create.topics.enable=false
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
num.network.threads=1
num.io.threads=2
background.threads=1
broker.session.timeout.ms=3000
broker.heartbeat.interval.ms=500
"""
_TLS = """
listener.name.login.ssl.keystore.type=PEM
listener.name.login.ssl.keystore.location={folder}/broker.pem
"""
USER, PASSWORD = "mill", "s3cret, with = and quotes '"
"""Who may log in where a broker asks for it."""


def broker_missing() -> str | None:
    """Why no broker can start here: a reason to skip. None: one can."""
    return java_missing() or jars_missing("broker")


class Record(NamedTuple):
    """A message of a topic."""

    partition: int
    key: bytes
    value: bytes


class Broker:
    """A broker that can be stopped and started, killed, paused and resumed.

    It keeps its ports and its log through all of that. Who comes to :attr:`login` has to show a
    user and a password; with ``tls`` in a connection that is encrypted, too.
    """

    def __init__(self, *, tls: bool = False) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="batchmill-kafka-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._client: AdminClient | None = None
        self._port, self._controller, self._login = free_ports(3)
        self._protocol = "SASL_SSL" if tls else "SASL_PLAINTEXT"
        self._properties = self._folder / "server.properties"
        self._properties.write_text(
            (_PROPERTIES + _TLS * tls).format(
                port=self._port,
                controller=self._controller,
                login=self._login,
                protocol=self._protocol,
                module="org.apache.kafka.common.security.plain.PlainLoginModule",
                user=USER,
                password=PASSWORD,
                folder=self._folder,
            )
        )
        if tls:
            self._certify()
        self._format()

    @property
    def bootstrap(self) -> str:
        """Its address, as clients take it."""
        return f"127.0.0.1:{self._port}"

    @property
    def login(self) -> str:
        """The address at which it asks who comes."""
        return f"127.0.0.1:{self._login}"

    def login_options(self, password: str = PASSWORD) -> dict[str, str]:
        """What a client of :attr:`login` has to be told, in librdkafka's names."""
        tls = {"ssl.ca.location": str(self._ca)} if self._ca.exists() else {}
        return {
            "security.protocol": self._protocol,
            "sasl.mechanisms": "PLAIN",
            "sasl.username": USER,
            "sasl.password": password,
            **tls,
        }

    def login_file(self, folder: Path, password: str = PASSWORD) -> Path:
        """The same in a file, as ``--kafka-config`` takes it."""
        file = folder / "kafka.properties"
        lines = [f"{name}={value}\n" for name, value in self.login_options(password).items()]
        file.write_text("".join(lines))
        return file

    @property
    def running(self) -> bool:
        """Whether its process is there, be it paused."""
        return self._process is not None

    def start(self) -> None:
        """Start it, and wait until it answers. At the latest it ends with this thread."""
        if self._process is not None:
            return
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*_die_with_parent(), *_java(), "kafka.Kafka", str(self._properties)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                start_new_session=True,
            )
        try:
            self._await_answer()
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """Stop it in order, and wait until it is gone."""
        process = self._process
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._process = None

    def kill(self) -> None:
        """End it as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Let it stand still: connections stay, nothing is answered."""
        assert self._process is not None
        pause_process(self._process.pid)

    def resume(self) -> None:
        """Let it go on."""
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGCONT)

    def create_topic(self, name: str, partitions: int = 1, **settings: str) -> None:
        """Make a topic; ``settings`` are the topic's, ``_`` for a dot: ``max_message_bytes``."""
        from confluent_kafka.cimpl import NewTopic

        config = {key.replace("_", "."): value for key, value in settings.items()}
        topic = NewTopic(name, num_partitions=partitions, replication_factor=1, config=config)
        for made in self._admin().create_topics([topic], operation_timeout=PATIENCE_S).values():
            made.result(PATIENCE_S)
        with self._consumer() as consumer:
            self._ends(consumer, name, partitions)

    def delete_records(self, topic: str) -> None:
        """Let a topic of one partition lose all that it has."""
        from confluent_kafka import TopicPartition

        for done in self._admin().delete_records([TopicPartition(topic, 0, -1)]).values():
            done.result(PATIENCE_S)

    def new_topic(self, partitions: int = 1, **settings: str) -> str:
        """Make a topic with a name that no other has."""
        name = f"spans-{uuid.uuid4().hex[:12]}"
        self.create_topic(name, partitions, **settings)
        return name

    def read(self, topic: str) -> list[Record]:
        """Everything that is in a topic now, partition by partition, in order."""
        from confluent_kafka import TopicPartition

        records: dict[tuple[int, int], Record] = {}
        with self._consumer() as consumer:
            ends = {where: end for where, end in self._ends(consumer, topic).items() if end}
            consumer.assign([TopicPartition(topic, end, 0) for end in ends])
            while ends:
                message = consumer.poll(PATIENCE_S)
                assert message is not None, "the broker does not go on"
                assert message.error() is None, message.error()
                where, offset, key, value = (
                    message.partition(),
                    message.offset(),
                    message.key(),
                    message.value(),
                )
                assert where is not None
                assert offset is not None
                assert value is not None
                if where in ends:
                    records[where, offset] = Record(where, key or b"", value)
                    if offset + 1 >= ends[where]:
                        del ends[where]
        return [records[place] for place in sorted(records)]

    def report(self) -> str:
        """What it said last."""
        return "\n".join(self._log.read_text("utf-8", "replace").splitlines()[-40:])

    def close(self) -> None:
        """End it and remove its folder."""
        self.kill()
        self._client = None
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _log(self) -> Path:
        return self._folder / "log"

    @property
    def _ca(self) -> Path:
        return self._folder / "ca.pem"

    def _certify(self) -> None:
        """A certificate of its own, signed by itself."""
        key = self._folder / "key.pem"
        name = ("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1")
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *name),
                *("-days", "2", "-keyout", str(key), "-out", str(self._ca)),
            ],
            check=True,
            capture_output=True,
        )
        (self._folder / "broker.pem").write_text(key.read_text() + self._ca.read_text())

    def _format(self) -> None:
        done = subprocess.run(
            [
                *(*_java(), "kafka.tools.StorageTool", "format"),
                *("--cluster-id", "YmF0Y2htaWxsLXRlc3RzMQ", "--config", str(self._properties)),
            ],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"the broker's folder was not made: {done.stdout}{done.stderr}")

    def _await_answer(self) -> None:
        admin, process = self._admin(), self._process
        assert process is not None
        until(lambda: _answers(admin) or process.poll() is not None, self.report)
        if process.poll() is not None:
            raise RuntimeError(f"the broker has ended:\n{self.report()}")

    @contextlib.contextmanager
    def _consumer(self) -> Iterator[Consumer]:
        from confluent_kafka import Consumer

        settings = {"bootstrap.servers": self.bootstrap, "group.id": "nobody"}
        quick = {"enable.auto.commit": False, "fetch.wait.max.ms": 10, "fetch.error.backoff.ms": 20}
        consumer = Consumer({**settings, **quick})
        try:
            yield consumer
        finally:
            consumer.close()

    def _ends(self, consumer: Consumer, topic: str, least: int = 1) -> dict[int, int]:
        """Where each partition ends. One that was just made, or whose broker was, takes a while."""
        from confluent_kafka import KafkaException, TopicPartition

        def ends() -> dict[int, int]:
            with contextlib.suppress(KafkaException):
                there = self._admin().list_topics(topic, timeout=PATIENCE_S).topics[topic]
                if there.error is None and len(there.partitions) >= least:
                    return {
                        partition: consumer.get_watermark_offsets(
                            TopicPartition(topic, partition), timeout=PATIENCE_S
                        )[1]
                        for partition in sorted(there.partitions)
                    }
            return {}

        return until(ends, lambda: f"the topic {topic} is there:\n{self.report()}")

    def _admin(self) -> AdminClient:
        if self._client is None:
            from confluent_kafka.admin import AdminClient

            quick = {"reconnect.backoff.ms": 50, "reconnect.backoff.max.ms": 200}
            # It is asked while there is nobody yet, and would write that down each time.
            self._client = AdminClient(
                {"bootstrap.servers": self.bootstrap, "log_level": 0, **quick}
            )
        return self._client


@contextlib.contextmanager
def private_broker(*, tls: bool = False) -> Iterator[Broker]:
    """A broker that nobody else uses, running."""
    broker = _make_broker(tls=tls)
    try:
        yield broker
    finally:
        broker.close()


@pytest.fixture(scope="session")
def kafka_server() -> Iterator[Broker]:
    """The one broker of a test run."""
    with private_broker() as broker:
        yield broker


@pytest.fixture
def kafka(kafka_server: Broker) -> Broker:
    """The broker, running, whatever the test before did to it."""
    kafka_server.resume()
    kafka_server.start()
    return kafka_server


def _make_broker(*, tls: bool = False) -> Broker:
    """A broker that runs; skips the test where there can be none, and fails it in CI."""
    pytest.importorskip("confluent_kafka", reason="install it: pip install 'batchmill[kafka]'")
    missing = broker_missing()
    if missing is not None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)
    broker = Broker(tls=tls)
    try:
        broker.start()
    except BaseException:
        broker.close()
        raise
    return broker


def _answers(admin: AdminClient) -> bool:
    from confluent_kafka import KafkaException

    try:
        return bool(admin.list_topics(timeout=1.0).brokers)
    except KafkaException:
        return False


def _die_with_parent() -> list[str]:
    """What makes a process end with its parent, where there is such a thing: tests get killed."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL"] if setpriv else []


def _java() -> list[str]:
    """Java, small and quick to start, with the broker's jars."""
    home = os.environ.get("JAVA_HOME")
    program = str(Path(home, "bin", "java")) if home else "java"
    classpath = os.pathsep.join(str(jar) for jar in jars("broker"))
    return [
        *(program, *QUICK, "-Xms64m", "-Xmx256m", "-Djava.awt.headless=true"),
        *("-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp", classpath),
    ]


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def span_batch(rows: Sequence[dict[str, Any]]) -> SpanBatch:
    """Rows as the decoder would have them."""
    from batchmill.spool import SPAN_COLUMNS, SpanBatch

    batch = SpanBatch()
    for row in rows:
        for name in SPAN_COLUMNS:
            value = row.get(name)
            if isinstance(value, datetime):
                value = (value - _EPOCH) // timedelta(microseconds=1)
            elif name in ("resource", "attributes"):
                value = dict(value or {})
            batch.columns[name].append(value)
    return batch


def send(
    broker: Broker, topic: str, rows: Sequence[dict[str, Any]] = (), *, raw: Sequence[bytes] = ()
) -> int:
    """Put spans, and whatever else, into a topic; how many messages it were."""
    from confluent_kafka import Producer

    from batchmill.kafka import encode

    producer = Producer({"bootstrap.servers": broker.bootstrap})
    messages = encode(span_batch(rows)) if rows else []
    for message in messages:
        producer.produce(topic, key=message.key, value=message.value)
    for value in raw:
        producer.produce(topic, value=value)
    assert producer.flush(PATIENCE_S) == 0
    return len(messages) + len(raw)
