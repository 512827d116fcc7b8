-- What lists look for (read/buckets.rs). A server that was stopped half-way has the first of these already; what is there is
-- passed over.

-- Which values occur in a bucket, about four seconds of ids (milliseconds divided by 4096), and there the first and the last
-- millisecond. Written behind the accepts. value is a hash of the field's letter and the text, so a row may promise what is
-- not there; bucket is looked for when its events are forgotten.
CREATE TABLE IF NOT EXISTS oncehook_buckets (
  value  BIGINT   NOT NULL,
  bucket BIGINT   NOT NULL,
  first  SMALLINT NOT NULL,
  last   SMALLINT NOT NULL,
  PRIMARY KEY (value, bucket),
  KEY oncehook_buckets_bucket (bucket)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- The last event that, with all before it, is in the index. One row; the node that fills the index has it locked.
CREATE TABLE IF NOT EXISTS oncehook_indexed (
  one  TINYINT    NOT NULL PRIMARY KEY,
  last BINARY(16) NOT NULL
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

INSERT IGNORE INTO oncehook_indexed (one, last) VALUES (1, REPEAT(x'00', 16));

-- Held events, in their order.
ALTER TABLE oncehook_flags ADD KEY oncehook_flags_flag (flag, event);
