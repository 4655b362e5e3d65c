"""A real PostgreSQL server for tests: made in a temporary folder, stopped at the end.

It listens on the loopback alone, asks for no password, and does not wait for the disk. Every test
that asks for ``postgres_url`` gets an empty database; ``backend`` has the tables of an empty store
in it, since a copy of those costs less than to make them. PostgreSQL refuses to run as root, so for
root it runs as the user postgres.
"""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kit.processes import free_port

MISSING = (
    "PostgreSQL's server programs are not here: install them with `apt-get install postgresql` "
    "(initdb, pg_ctl and postgres, in /usr/lib/postgresql/*/bin or on the PATH)"
)
NEEDED = ("initdb", "pg_ctl", "postgres")
START_S = 120
SETTINGS = """
listen_addresses = '127.0.0.1'
fsync = off
full_page_writes = off
max_connections = 60
shared_buffers = '128MB'
max_wal_size = '2GB'
log_min_messages = fatal
autovacuum = off
wal_level = minimal
max_wal_senders = 0
jit = off
"""


class Postgres:
    """A cluster that can be stopped and started."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self._folder = folder
        self._programs = programs
        self._numbers = itertools.count(1)
        self._template: str | None = None
        self.port = free_port()
        self.running = False

    @property
    def data(self) -> Path:
        """The folder of the cluster."""
        return self._folder / "data"

    def create(self) -> None:
        """Make the cluster."""
        self._run("initdb", "-D", str(self.data), "-A", "trust", "-U", "postgres", "-N")
        with (self.data / "postgresql.conf").open("a") as settings:
            settings.write(SETTINGS)
            settings.write(f"port = {self.port}\nunix_socket_directories = '{self._folder}'\n")

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        if not self.running:
            log = str(self._folder / "log")
            self._run("pg_ctl", "-D", str(self.data), "-l", log, "-w", "-t", str(START_S), "start")
            self.running = True

    def stop(self, mode: str = "fast") -> None:
        """Stop the server, and wait until it is gone; ``immediate`` is a crash."""
        if self.running:
            self._run("pg_ctl", "-D", str(self.data), "-m", mode, "-w", "stop")
            self.running = False

    def new_database(self, template: str = "template1") -> str:
        """A database like another one, else an empty one; its address."""
        name = f"test_{next(self._numbers)}"
        # By default 15 and later write the copy to the log as well: four times the work.
        strategy = "STRATEGY file_copy" if self._version() >= 15 else ""
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template} {strategy}")
        return f"postgresql://postgres@127.0.0.1:{self.port}/{name}"

    def new_store(self, create: Callable[[str], None]) -> str:
        """A database with an empty store that ``create`` makes once, for all later ones."""
        if self._template is None:
            address = self.new_database()
            create(address)
            self._template = address.rpartition("/")[2]
        address = self.new_database(self._template)
        own = "UPDATE meta SET value = gen_random_uuid()::text WHERE key = 'store_id'"
        self.execute(own, address.rpartition("/")[2])
        return address

    def execute(self, sql: str, database: str = "postgres") -> None:
        """Run one statement."""
        import psycopg

        address = f"postgresql://postgres@127.0.0.1:{self.port}/{database}"
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute(sql.encode())

    def drop_all(self) -> None:
        """Stop the server for good and remove its folder."""
        try:
            self.stop("immediate")
        finally:
            # Hundreds of databases are as many thousands of files: nobody waits for that.
            subprocess.run(["sh", "-c", 'rm -rf "$0" &', str(self._folder)], check=True)

    def _version(self) -> int:
        return int((self.data / "PG_VERSION").read_text())

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), *arguments]
        if os.geteuid() == 0:
            command = ["runuser", "-u", "postgres", "--", *command]
        # To a file and not to a pipe: the server inherits it, and a pipe would stay open.
        with (self._folder / "output").open("w+") as output:
            done = subprocess.run(
                command,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=START_S + 30,
                check=False,
            )
            if done.returncode:
                output.seek(0)
                raise RuntimeError(f"{' '.join(command)} failed:\n{output.read()}")


def make_postgres() -> Postgres | None:
    """A cluster that runs; None where PostgreSQL is not installed."""
    programs = _programs()
    if programs is None:
        return None
    folder = Path(tempfile.mkdtemp(prefix="batchmill-pg-"))
    server = Postgres(folder, programs)
    try:
        if os.geteuid() == 0:
            owner = pwd.getpwnam("postgres")
            os.chown(folder, owner.pw_uid, owner.pw_gid)
        server.create()
        server.start()
    except BaseException:
        server.drop_all()
        raise
    return server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    """The one server of a test run."""
    pytest.importorskip("psycopg", reason="install it with: pip install 'batchmill[postgres]'")
    server = make_postgres()
    if server is None:
        pytest.skip(MISSING)
    try:
        yield server
    finally:
        server.drop_all()


@pytest.fixture
def postgres(postgres_server: Postgres) -> Postgres:
    """The server, running, whatever the test before did to it."""
    postgres_server.start()
    return postgres_server


@pytest.fixture
def postgres_url(postgres: Postgres) -> str:
    """The address of an empty database."""
    return postgres.new_database()


def _programs() -> Path | None:
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=_version, reverse=True)
    on_path = shutil.which("initdb")
    if on_path:
        folders.append(Path(on_path).resolve().parent)
    for folder in folders:
        if all((folder / name).exists() for name in NEEDED):
            return folder
    return None


def _version(folder: Path) -> int:
    name = folder.parent.name
    return int(name) if name.isdigit() else 0
