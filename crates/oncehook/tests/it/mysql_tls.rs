//! TLS to MariaDB: encrypted as the URL asks, and to nobody else than whom it names.

use std::sync::Arc;
use std::time::Duration;

use oncehook::delivery::{RouteName, Settled};
use oncehook::event::{NewEvent, SourceName};
use oncehook::handler::{Dialect, Guarded as _, Handler, OnMysql, SqlHandler};
use oncehook::journal::mysql::{MysqlElsewhere, MysqlJournal, MysqlOptions};
use oncehook::journal::{Deliveries as _, Journal as _};
use oncehook::route::Route;
use oncehook_testkit::journal::{append, event};
use oncehook_testkit::mysql::{Server, is_mariadb};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

/// An authority, and a certificate for `localhost` that it has signed; as PEM.
struct Papers {
    authority: String,
    certificate: String,
    key: String,
}

fn papers() -> Papers {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(["localhost".to_owned()]).unwrap();
    let certificate = params.signed_by(&key, &issuer).unwrap();
    Papers { authority: issuer.pem(), certificate: certificate.pem(), key: key.serialize_pem() }
}

/// The cipher of a worker's session, as the server names it.
async fn cipher(url: &str, key: &str) -> String {
    let journal = MysqlJournal::open(&MysqlOptions::new(url)).await.unwrap();
    let ask = OnMysql::new(|database, _| {
        Box::pin(async move {
            let schema = if is_mariadb() { "information_schema" } else { "performance_schema" };
            let asked =
                format!("SELECT VARIABLE_VALUE FROM {schema}.session_status WHERE VARIABLE_NAME = 'Ssl_cipher'");
            let rows = database.query(&asked, &[]).await?;
            Ok(Some(rows[0].get::<String, _>(0).into()))
        })
    });
    let name = RouteName::new("ask").unwrap();
    let handler = Handler::Function(Arc::new(ask));
    let route = Arc::new(Route::new(name.clone(), SourceName::new("shop").unwrap(), handler));
    let new = NewEvent { routes: [name].into_iter().collect(), ..event(key, "{}") };
    append(&journal, [new]).await;
    let claims = journal.claim(Arc::clone(&route), 1, Duration::from_secs(60)).await.unwrap();
    let delivery = claims[0].fence.delivery.clone();
    assert_eq!(journal.call(route, claims).await.unwrap(), [Settled::Done]);
    let found = oncehook::journal::JournalReader::show(&journal, delivery.event).await.unwrap().unwrap();
    journal.close().await;
    found.event.deliveries[0].result.clone().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_connection_to_mysql_is_encrypted_and_its_certificate_checked_as_the_url_says() {
    let directory = tempfile::tempdir().unwrap();
    let (ours, others) = (papers(), papers());
    let write = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let (root, other) = (write("root.pem", &ours.authority), write("other.pem", &others.authority));
    let certificate = format!("--ssl-cert={}", write("server.pem", &ours.certificate));
    let key = format!("--ssl-key={}", write("server.key", &ours.key));
    let server = Server::start(&[&certificate, &key]);
    let database = server.database();
    // Whoever comes without TLS is not let in.
    database.query("CREATE USER careful@'%' IDENTIFIED BY 'hunter2' REQUIRE SSL; GRANT ALL ON *.* TO careful@'%'");
    let url = |user: &str, host: &str, parameters: &str| {
        format!("mysql://{user}@{host}:{}/{}{parameters}", server.port(), database.name())
    };
    let careful = "careful:hunter2";
    for (host, parameters) in [
        ("localhost", format!("?ssl-mode=VERIFY_IDENTITY&ssl-ca={}", root.replace('/', "%2F"))),
        ("127.0.0.1", "?ssl-mode=REQUIRED".to_owned()),
        ("127.0.0.1", "?ssl-mode=preferred".to_owned()),
    ] {
        let cipher = cipher(&url(careful, host, &parameters), &parameters).await;
        assert!(cipher.len() > 4, "{parameters}: {cipher}");
    }
    for parameters in ["", "?ssl-mode=DISABLED"] {
        assert_eq!(cipher(&url("root", "127.0.0.1", parameters), parameters).await, "\"\"", "{parameters}");
        let refused = MysqlJournal::open(&MysqlOptions::new(url(careful, "127.0.0.1", parameters))).await;
        assert!(refused.err().unwrap().to_string().contains("Access denied"), "{parameters}");
    }
    for (host, parameters, told) in [
        ("127.0.0.1", format!("?ssl-mode=VERIFY_IDENTITY&ssl-ca={root}"), "not valid for name"),
        ("localhost", format!("?ssl-mode=VERIFY_IDENTITY&ssl-ca={other}"), "ssl-ca"),
        // The system does not trust an authority that was made a moment ago.
        ("localhost", "?ssl-mode=VERIFY_IDENTITY".to_owned(), "UnknownIssuer"),
    ] {
        let url = url(careful, host, &parameters);
        let refused = MysqlJournal::open(&MysqlOptions::new(&url)).await.err();
        let refused = refused.unwrap_or_else(|| panic!("{parameters} was believed")).to_string();
        assert!(refused.contains("invalid peer certificate") && refused.contains(told), "{refused}");
        // The same for effects in a database of their own.
        let elsewhere = MysqlElsewhere::new(&url).unwrap();
        let statement = SqlHandler::new(&["SELECT 1"], &Default::default(), Dialect::Mysql).unwrap();
        let refused = elsewhere.rehearse(&statement).await.unwrap_err();
        assert!(refused.contains("invalid peer certificate"), "{refused}");
    }
}

/// A server without TLS is no server for those who insist on it, and not one byte of a password is sent there.
#[tokio::test(flavor = "multi_thread")]
async fn a_mysql_server_without_tls_is_refused_if_tls_is_required() {
    // MySQL makes itself a certificate where it is given none.
    let server = (!is_mariadb()).then(|| Server::start(&["--tls-version="]));
    let database = server.as_ref().unwrap_or_else(|| Server::shared()).database();
    for mode in ["REQUIRED", "VERIFY_IDENTITY"] {
        let url = format!("{}?ssl-mode={mode}", database.url());
        let refused = MysqlJournal::open(&MysqlOptions::new(url)).await.err().unwrap().to_string();
        assert!(refused.contains("does not speak TLS"), "{mode}: {refused}");
    }
    let url = format!("{}?ssl-mode=PREFERRED", database.url());
    assert_eq!(cipher(&url, "evt_1").await, "\"\"");
    // A password goes there encrypted, in the server's own way, if the URL does not ask for TLS.
    database.query("CREATE USER plain@'%' IDENTIFIED BY 'hunter2'; GRANT ALL ON *.* TO plain@'%'");
    assert_eq!(cipher(&database.url().replace("root@", "plain:hunter2@"), "evt_2").await, "\"\"");
}
