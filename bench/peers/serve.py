"""Starts a whole stack on free ports in a directory of its own, says where it is, and stops it when its input ends."""
import os
import pathlib
import pwd
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

SECRET = "whsec_test_secret_of_the_gateway"
TABLES = """
CREATE TABLE webhook_events (id BIGINT AUTO_INCREMENT PRIMARY KEY, event_id VARCHAR(255) NOT NULL UNIQUE,
  type VARCHAR(255) NOT NULL, payload TEXT NOT NULL, processed BOOLEAN NOT NULL) ENGINE=InnoDB;
CREATE TABLE orders (id BIGINT AUTO_INCREMENT PRIMARY KEY, payment_id VARCHAR(255) NOT NULL UNIQUE,
  amount BIGINT NOT NULL) ENGINE=InnoDB;
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(what, check, seconds=60):
    deadline = time.monotonic() + seconds
    while True:
        try:
            return check()
        except Exception as error:
            if time.monotonic() > deadline:
                raise SystemExit(f"{what} did not start: {error}")
            time.sleep(0.1)


def main(variant: str, directory: str) -> None:
    here, work = pathlib.Path(__file__).parent.resolve(), pathlib.Path(directory).resolve()
    data = work / "mariadb"
    data.mkdir(parents=True)
    started = []

    def start(*command, **options):
        log = open(work / f"{pathlib.Path(command[0]).name}-{len(started)}.log", "w")
        started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, **options))

    try:
        # MariaDB refuses to be root; its directory belongs to somebody who may do nothing else.
        user = []
        if os.geteuid() == 0:
            user = ["--user=nobody"]
            account = pwd.getpwnam("nobody")
            os.chown(data, account.pw_uid, account.pw_gid)
            for parent in data.parents:
                if parent.stat().st_mode & 0o001 == 0:
                    parent.chmod(parent.stat().st_mode | 0o011)
        subprocess.run(["mariadb-install-db", "--no-defaults", *user, f"--datadir={data}", "--auth-root-authentication-method=normal",
                        "--skip-test-db"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        database, broker, web = free_port(), free_port(), free_port()
        server = shutil.which("mariadbd") or "/usr/sbin/mariadbd"
        start(server, "--no-defaults", *user, f"--datadir={data}", f"--port={database}", "--bind-address=127.0.0.1",
              f"--socket={data}/s", "--skip-log-bin", "--innodb-flush-log-at-trx-commit=1",
              "--innodb-buffer-pool-size=512M", "--innodb-log-file-size=256M", "--max-connections=300")
        client = ["mariadb", "--no-defaults", "-uroot", f"--socket={data}/s"]
        script = (f"CREATE DATABASE shop; USE shop; {TABLES} "
                  "CREATE USER shop@'127.0.0.1' IDENTIFIED BY 'shop'; GRANT ALL ON shop.* TO shop@'127.0.0.1';")
        wait_for("MariaDB", lambda: subprocess.run([*client, "-e", "SELECT 1"], check=True, capture_output=True))
        subprocess.run(client, input=script.encode(), check=True)
        start("redis-server", "--port", str(broker), "--bind", "127.0.0.1", "--dir", str(work), "--save", "")
        driver = "mysql+pymysql" if variant == "tutorial" else "mysql"
        environment = os.environ | {
            "REDIS_URL": f"redis://127.0.0.1:{broker}/0", "WEBHOOK_SECRET": SECRET,
            "DATABASE_URL": f"{driver}://shop:shop@127.0.0.1:{database}/shop", "PYTHONPATH": str(here / variant)}
        python = pathlib.Path(sys.executable).parent
        quiet = ["--no-access-log", "--log-level", "warning"] if variant == "tuned" else []
        start(str(python / "uvicorn"), "web:app", "--host", "127.0.0.1", "--port", str(web), "--workers", "2", *quiet,
              cwd=here / variant, env=environment)
        start(str(python / "celery"), "-A", "tasks", "worker", "--concurrency", "2", "--loglevel", "warning",
              *(["--without-gossip", "--without-mingle", "--without-heartbeat", "-O", "fair"] if variant == "tuned" else []),
              cwd=work, env=environment)
        address = f"http://127.0.0.1:{web}"
        wait_for("the receiver", lambda: urllib.request.urlopen(f"{address}/count", timeout=2).read())
        print(f"ready {address}", flush=True)
        sys.stdin.read()
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


if __name__ == "__main__":
    main(*sys.argv[1:])
