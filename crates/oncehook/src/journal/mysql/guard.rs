//! The guards of effects in a database of the user's on MySQL or MariaDB.
//!
//! They stand in tables of their own beside the user's. There is no conflict target to name here: a guard that exists
//! is looked for and locked first, by the name of its key, so a key that is gone is an error.

use super::Mysql;
use super::connection::Session;
use super::engine_error::EngineError;
use crate::journal::server::external::{ExternalDatabase, GuardSql, Guards, Shape, Write};

/// A database of the user's on MySQL or MariaDB.
pub type MysqlElsewhere = ExternalDatabase<Mysql>;

/// `attempt` is the one that wrote the row. `journal` says whose delivery or entity it is, because several gateways
/// may use the database. Of an entity, `version` counts effects; `newest` and `last_at` are those of the newest one.
/// It is not called `oncehook_entities` because a journal may stand in the same database.
const TABLES: [&str; 2] = [
    "CREATE TABLE IF NOT EXISTS oncehook_applied (
  event   BINARY(16) NOT NULL,
  route   VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  epoch   INT UNSIGNED NOT NULL,
  attempt INT UNSIGNED NOT NULL,
  void    TINYINT NOT NULL,
  result  MEDIUMTEXT CHARACTER SET utf8mb4,
  journal BIGINT NOT NULL,
  at      BIGINT NOT NULL,
  PRIMARY KEY (event, route, epoch)
) ENGINE = InnoDB",
    "CREATE TABLE IF NOT EXISTS oncehook_applied_entities (
  journal BIGINT         NOT NULL,
  scope   VARBINARY(128) NOT NULL,
  entity  VARBINARY(255) NOT NULL,
  version BIGINT         NOT NULL DEFAULT 0,
  newest  BIGINT,
  last_at BIGINT,
  state   VARBINARY(255),
  PRIMARY KEY (journal, scope, entity)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC",
];

/// The database's time in microseconds.
macro_rules! now {
    () => {
        "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
    };
}

/// The rows of `$1`, by event, route and epoch and what comes fourth.
macro_rules! deliveries {
    ($fourth:literal) => {
        concat!(
            "JSON_TABLE($1, '$[*]' COLUMNS (event VARCHAR(32) PATH '$[0]',
                        route VARCHAR(64) CHARACTER SET ascii PATH '$[1]',
                        epoch INT UNSIGNED PATH '$[2]', ",
            $fourth,
            " PATH '$[3]')) t"
        )
    };
}

macro_rules! same_delivery {
    () => {
        "ON a.event = UNHEX(t.event) AND a.route = t.route AND a.epoch = t.epoch "
    };
}

/// The rows of `$1`, and the guards of the same deliveries.
macro_rules! guards_of {
    ($fourth:literal) => {
        concat!(deliveries!($fourth), " STRAIGHT_JOIN oncehook_applied a ", same_delivery!())
    };
}

impl Guards for Mysql {
    const GUARD: GuardSql = GuardSql {
        // Sessions never commit by themselves.
        begin: None,
        guards: Shape {
            name: "oncehook_applied",
            lines: "column at bigint not null; column attempt int not null; column epoch int not null; \
                    column event binary not null; column journal bigint not null; \
                    column result mediumtext; column route varchar not null collate ascii_bin; \
                    column void tinyint not null; key PRIMARY event,route,epoch; table InnoDB",
        },
        entities: Shape {
            name: "oncehook_applied_entities",
            lines: "column entity varbinary not null; column journal bigint not null; \
                    column last_at bigint; column newest bigint; column scope varbinary not null; \
                    column state varbinary; column version bigint not null; \
                    key PRIMARY journal,scope,entity; table InnoDB",
        },
        // A trigger or another unique key would show here too.
        shape: "
SELECT CONCAT('table ', ENGINE) FROM information_schema.TABLES
 WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = $1
UNION ALL
SELECT CONCAT('column ', COLUMN_NAME, ' ', DATA_TYPE, IF(IS_NULLABLE = 'YES', '', ' not null'),
              IF(COLUMN_NAME = 'route', CONCAT(' collate ', COLLATION_NAME), ''))
  FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = $1
UNION ALL
SELECT CONCAT('key ', INDEX_NAME, ' ', GROUP_CONCAT(COLUMN_NAME, COALESCE(SUB_PART, '') ORDER BY SEQ_IN_INDEX))
  FROM information_schema.STATISTICS
 WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = $1 AND NON_UNIQUE = 0 GROUP BY INDEX_NAME
UNION ALL
SELECT CONCAT('trigger ', TRIGGER_NAME) FROM information_schema.TRIGGERS
 WHERE EVENT_OBJECT_SCHEMA = DATABASE() AND EVENT_OBJECT_TABLE = $1",
        write: Write::AfterLook {
            insert: concat!(
                "INSERT INTO oncehook_applied (event, route, epoch, attempt, void, journal, at)
                 SELECT UNHEX(t.event), t.route, t.epoch, t.attempt, $3, $2, ",
                now!(),
                "
                   FROM JSON_TABLE($1, '$[*]' COLUMNS (event VARCHAR(32) PATH '$[0]',
                                   route VARCHAR(64) CHARACTER SET ascii PATH '$[1]',
                                   epoch INT UNSIGNED PATH '$[2]', attempt INT UNSIGNED PATH '$[3]')) t"
            ),
            replace: concat!(
                "UPDATE ",
                guards_of!("attempt INT UNSIGNED"),
                "SET a.attempt = t.attempt, a.void = $3, a.result = NULL, a.journal = $2, a.at = ",
                now!()
            ),
            met: "1062",
        },
        look: concat!(
            "SELECT a.event, a.route, a.epoch, a.attempt, a.void, a.result FROM (SELECT * FROM ",
            deliveries!("none INT"),
            ") t STRAIGHT_JOIN oncehook_applied a FORCE INDEX (PRIMARY) ",
            same_delivery!(),
            "FOR UPDATE"
        ),
        give_up: concat!("UPDATE ", guards_of!("none INT"), "SET a.void = 1"),
        keep_results: concat!(
            "UPDATE ",
            guards_of!("result MEDIUMTEXT CHARACTER SET utf8mb4"),
            "SET a.result = t.result"
        ),
        // The first 48 bits of an id are milliseconds.
        aged: concat!(
            "SELECT event, route, epoch FROM oncehook_applied
              WHERE event >= $1 AND (event > $1 OR epoch > $3)
                AND event < UNHEX(RPAD(LPAD(HEX((LEAST(",
            now!(),
            ", $7) - $4) DIV 1000), 12, '0'), 32, '0'))
                AND route = $2 AND journal = $5 AND at < LEAST(",
            now!(),
            ", $7) - $4
              ORDER BY event, route, epoch LIMIT $6"
        ),
        forget: concat!("DELETE a FROM ", guards_of!("none INT")),
        // A row that is there is locked by being met, one that is not by being written.
        add_entities: "INSERT INTO oncehook_applied_entities (journal, scope, entity)
                       SELECT $2, $3, CAST(t.entity AS BINARY)
                         FROM JSON_TABLE($1, '$[*]' COLUMNS (entity VARCHAR(255) CHARACTER SET utf8mb4 PATH '$')) t
                       ON DUPLICATE KEY UPDATE version = oncehook_applied_entities.version",
        lock_entities: "SELECT e.entity, e.newest, e.last_at, e.state, e.version
                          FROM (SELECT * FROM JSON_TABLE($1, '$[*]' COLUMNS (entity VARCHAR(255) CHARACTER SET utf8mb4 PATH '$')) t) t
                         STRAIGHT_JOIN oncehook_applied_entities e FORCE INDEX (PRIMARY)
                            ON e.journal = $2 AND e.scope = $3 AND e.entity = CAST(t.entity AS BINARY)
                           FOR UPDATE",
        keep_entities: "UPDATE JSON_TABLE($1, '$[*]' COLUMNS (entity VARCHAR(255) CHARACTER SET utf8mb4 PATH '$[0]',
                               version BIGINT PATH '$[1]', newest BIGINT PATH '$[2]', last_at BIGINT PATH '$[3]',
                               state VARCHAR(255) CHARACTER SET utf8mb4 PATH '$[4]')) t
                         STRAIGHT_JOIN oncehook_applied_entities e
                            ON e.journal = $2 AND e.scope = $3 AND e.entity = CAST(t.entity AS BINARY)
                           SET e.version = t.version, e.newest = t.newest, e.last_at = t.last_at,
                               e.state = CAST(t.state AS BINARY)",
    };

    async fn make_tables(session: &mut Session) -> Result<(), EngineError> {
        for table in TABLES {
            session.run(table).await?;
        }
        Ok(())
    }
}
