//! What the gateway looks at before it opens a port on PostgreSQL: the schema, the certificate, and whether sessions are its
//! own.

use std::io::Write as _;
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use oncehook::journal::postgres::PostgresJournal;
use oncehook_testkit::chaos_proxy::{ChaosProxy, Direction};
use oncehook_testkit::postgres::{Database, Server};
use oncehook_testkit::promises::{Senders, assert_is_unavailable};
use oncehook_testkit::sender::ask;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

use crate::postgres::{SHOP, check_once, serve_at, try_serve, until_ready};

/// Another program changes our schema while nobody looks: there is no port to send anything to.
#[tokio::test(flavor = "multi_thread")]
async fn fault_105_a_changed_schema_on_postgres_opens_no_port() {
    let directory = tempfile::tempdir().unwrap();
    for (change, told) in [
        ("ALTER TABLE oncehook.keys RENAME COLUMN key TO idempotency_key", "column keys.key bytea not null"),
        ("ALTER TABLE oncehook.keys DROP CONSTRAINT keys_once", "index keys_once on keys"),
        (
            "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'oncehook.keys_once'::regclass",
            "index keys_once on keys",
        ),
        (
            "ALTER TABLE oncehook.keys DROP CONSTRAINT keys_once;
             CREATE INDEX keys_once ON oncehook.keys (source, key)",
            "index keys_once on keys",
        ),
        (
            "CREATE COLLATION folding (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
             ALTER TABLE oncehook.keys ALTER COLUMN source TYPE text COLLATE folding",
            "column keys.source text not null",
        ),
    ] {
        let database = Server::shared().database();
        database.query(SHOP);
        PostgresJournal::migrate(&database.url()).await.unwrap();
        database.query(change);
        let refused = try_serve(&database.url(), directory.path(), &[]).err();
        let refused = refused.unwrap_or_else(|| panic!("it serves after: {change}"));
        assert!(refused.contains("schema check failed") && refused.contains(told), "{change}: {refused}");
        assert!(!refused.contains("webhooks  http"), "{refused}");
    }
}

/// The same while it runs: it refuses from the first request that would need the lost key, and says why.
#[tokio::test(flavor = "multi_thread")]
async fn fault_105_a_schema_that_changes_under_a_running_gateway_closes_it_until_it_is_mended() {
    let database = Server::shared().database();
    database.query(SHOP);
    let directory = tempfile::tempdir().unwrap();
    let gateway = serve_at(&database.url(), directory.path(), &[]);
    let senders = Senders::new(600, 0);
    senders.send_new(gateway.ingress, 10, 2).await;
    database.query("ALTER TABLE oncehook.keys DROP CONSTRAINT keys_once");
    assert_is_unavailable(&ask(gateway.ingress, &senders.request("evt_4000")).await.unwrap());
    let begun = Instant::now();
    loop {
        let readiness = gateway.get("/readyz").await;
        let failing = readiness.json()["failing"].as_str().unwrap_or_default().to_owned();
        if readiness.status == 503 && failing.contains("keys_once") {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(30), "{failing}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    database.query("ALTER TABLE oncehook.keys ADD CONSTRAINT keys_once PRIMARY KEY (source, key)");
    until_ready(&gateway).await;
    senders.send_new(gateway.ingress, 10, 2).await;
    assert_eq!(check_once(&database).await, 20);
}

/// An authority, and a certificate for a name that it has signed; as PEM.
struct Papers {
    authority: String,
    certificate: String,
    key: String,
}

fn papers(name: &str) -> Papers {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::new([name.to_owned()]).unwrap().signed_by(&key, &issuer).unwrap();
    Papers { authority: issuer.pem(), certificate: certificate.pem(), key: key.serialize_pem() }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_connection_to_postgres_is_encrypted_and_its_certificate_checked_as_the_url_says() {
    let directory = tempfile::tempdir().unwrap();
    let (ours, others) = (papers("localhost"), papers("localhost"));
    let write = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string().replace('/', "%2F")
    };
    let (root, other) = (write("root.pem", &ours.authority), write("other.pem", &others.authority));
    let server = Server::start_encrypted(&ours.certificate, &ours.key);
    let database = server.database();
    database.query(SHOP);
    let url = |host: &str, parameters: String| {
        format!("postgres://postgres@{host}:{}/{}?{parameters}", server.port(), database.name())
    };
    let encrypted = "SELECT string_agg(DISTINCT ssl::text, ',') FROM pg_stat_ssl JOIN pg_stat_activity USING (pid)
                      WHERE application_name = 'oncehook'";
    for (host, parameters, sees) in [
        ("localhost", format!("sslmode=verify-full&sslrootcert={root}"), "true"),
        ("127.0.0.1", format!("sslmode=verify-ca&sslrootcert={root}"), "true"),
        ("127.0.0.1", format!("sslmode=require&sslrootcert={root}"), "true"),
        ("127.0.0.1", "sslmode=require".to_owned(), "true"),
        ("127.0.0.1", "sslmode=prefer".to_owned(), "true"),
        ("127.0.0.1", "sslmode=disable".to_owned(), "false"),
    ] {
        let mut gateway = serve_at(&url(host, parameters.clone()), directory.path(), &[]);
        assert_eq!(database.query(encrypted), sees, "{parameters}");
        let senders = Senders::new(60_000, 0);
        let request = senders.request(&format!("evt_{}", parameters.len()));
        assert_eq!(ask(gateway.ingress, &request).await.unwrap().status, 200, "{parameters}");
        assert!(gateway.stop().success());
    }
    for (host, parameters, told) in [
        ("127.0.0.1", format!("sslmode=verify-full&sslrootcert={root}"), "not valid for name"),
        ("localhost", format!("sslmode=verify-full&sslrootcert={other}"), "invalid peer certificate"),
        ("localhost", format!("sslmode=verify-ca&sslrootcert={other}"), "invalid peer certificate"),
        ("localhost", format!("sslmode=require&sslrootcert={other}"), "invalid peer certificate"),
        // The system does not trust an authority that was made a moment ago.
        ("localhost", "sslmode=verify-full".to_owned(), "invalid peer certificate"),
        ("localhost", "sslmode=verify-ca&sslrootcert=system".to_owned(), "invalid peer certificate"),
        ("localhost", "sslmode=verify-full&sslrootcert=%2Fnowhere.pem".to_owned(), "sslrootcert /nowhere.pem"),
    ] {
        let refused = try_serve(&url(host, parameters.clone()), directory.path(), &[]).err();
        let refused = refused.unwrap_or_else(|| panic!("{host} {parameters} was believed"));
        assert!(refused.contains(told) && !refused.contains("waiting"), "{parameters}: {refused}");
    }
    // A server without TLS is no server for those who insist on it.
    let plain = Server::shared().database();
    let insisting = format!("{}?sslmode=require", plain.url());
    let refused = try_serve(&insisting, directory.path(), &["--database-wait", "0"]).err().unwrap();
    assert!(refused.contains("TLS"), "{refused}");
}

/// PgBouncer in front of a database, ended when dropped.
struct Bouncer {
    process: Child,
    port: u16,
}

impl Bouncer {
    fn start(database: &Database<'_>, directory: &Path, mode: &str) -> Self {
        let program = Path::new("/usr/sbin/pgbouncer");
        assert!(program.exists(), "PgBouncer is not installed: run `make services` first");
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let target = database.url();
        let server_port = target.rsplit(':').next().unwrap().split('/').next().unwrap();
        let users = directory.join("users.txt");
        std::fs::write(&users, "\"postgres\" \"\"\n").unwrap();
        let config = format!(
            "[databases]\n* = host=127.0.0.1 port={server_port} user=postgres\n[pgbouncer]\nlisten_addr = 127.0.0.1\n\
             listen_port = {port}\nunix_socket_dir =\nauth_type = trust\nauth_file = {}\npool_mode = {mode}\n\
             default_pool_size = 40\n",
            users.display(),
        );
        let file = directory.join(format!("pgbouncer-{mode}.ini"));
        std::fs::File::create(&file).unwrap().write_all(config.as_bytes()).unwrap();
        // It does not run as root, and whoever it runs as has to read these.
        std::fs::set_permissions(directory, std::fs::Permissions::from_mode(0o755)).unwrap();
        let mut command = match Command::new("id").arg("-u").output().unwrap().stdout.as_slice() {
            b"0\n" => {
                let mut command = Command::new("setpriv");
                command.args(["--reuid=postgres", "--regid=postgres", "--clear-groups", "--"]).arg(program);
                command
            }
            _ => Command::new(program),
        };
        let process = command.arg(&file).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let begun = Instant::now();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(begun.elapsed() < Duration::from_secs(30), "PgBouncer did not start");
            std::thread::sleep(Duration::from_millis(20));
        }
        Self { process, port }
    }
}

impl Drop for Bouncer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pooler_in_transaction_mode_is_refused_with_a_way_out_and_one_in_session_mode_works() {
    let database = Server::shared().database();
    database.query(SHOP);
    let directory = tempfile::tempdir().unwrap();
    for mode in ["transaction", "statement"] {
        let bouncer = Bouncer::start(&database, directory.path(), mode);
        let refused = try_serve(&database.url_at(bouncer.port), directory.path(), &[]).err();
        let refused = refused.unwrap_or_else(|| panic!("it serves in {mode} mode"));
        assert!(refused.contains("pool_mode = session"), "{mode}: {refused}");
    }
    let nothing = database.query("SELECT count(*) FROM pg_namespace WHERE nspname = 'oncehook'");
    assert_eq!(nothing, "0", "it was refused before anything was made");

    let bouncer = Bouncer::start(&database, directory.path(), "session");
    let proxy = ChaosProxy::start(bouncer.port);
    let gateway = serve_at(&database.url_at(proxy.port()), directory.path(), &[]);
    let other = serve_at(&database.url(), directory.path(), &["ingest"]);
    let senders = Senders::new(600, 0);
    senders.send_new(gateway.ingress, 50, 4).await;
    senders.send_new(other.ingress, 50, 4).await;
    assert_eq!(check_once(&database).await, 100);
    assert!(proxy.passed(Direction::ToServer) > 10_000, "it went another way");
}
