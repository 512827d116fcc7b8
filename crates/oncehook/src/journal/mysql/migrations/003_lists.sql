-- What lists look for (search.rs). A server that was stopped half-way has the first of these already; what is there is passed over.

-- Which sources, types and entities occur in a span, whether an event without deliveries does, and whether an id runs ahead.
-- Written behind the accepts. value is the first bytes of a digest, so neighbours in the table have nothing to do with each
-- other; span is about four seconds of ids (milliseconds divided by 4096), and is looked for when its events are forgotten.
CREATE TABLE IF NOT EXISTS oncehook_marks (
  value BINARY(8) NOT NULL,
  span  BIGINT    NOT NULL,
  PRIMARY KEY (value, span),
  KEY oncehook_marks_span (span)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- The last event that, with all before it, is marked. One row; whoever marks has it locked.
CREATE TABLE IF NOT EXISTS oncehook_marked (
  one  TINYINT    NOT NULL PRIMARY KEY,
  last BINARY(16) NOT NULL
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

INSERT IGNORE INTO oncehook_marked (one, last) VALUES (1, REPEAT(x'00', 16));

-- Events of which a delivery ended without success (ends.rs).
CREATE TABLE IF NOT EXISTS oncehook_ends (
  state ENUM('dead', 'superseded', 'skipped') CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  event BINARY(16) NOT NULL,
  PRIMARY KEY (state, event)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

INSERT IGNORE INTO oncehook_ends (state, event)
SELECT DISTINCT CONVERT(state USING ascii), event FROM oncehook_deliveries WHERE state IN ('dead', 'superseded', 'skipped');

-- Held events, in their order.
ALTER TABLE oncehook_flags ADD KEY oncehook_flags_flag (flag, event);
