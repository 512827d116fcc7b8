-- The order of an entity's events. A server that was stopped half-way has the first of these already; what is there is passed over.

-- Which version of its entity an event tells about, as the provider counts.
ALTER TABLE oncehook_events ADD COLUMN version BIGINT;

-- The newest version that took effect. (version counts effects, last_at is the newest time.) The row of (route, entity) is
-- also the lock under which workers decide whose turn it is.
ALTER TABLE oncehook_entities ADD COLUMN newest BIGINT, MODIFY COLUMN scope VARBINARY(128) NOT NULL;

-- entity and version stand here where a route of the event's source looks at them, and at parked ones. What waits for its turn
-- has no due time: run_at is the largest number. blocked_at: since when it has waited for its turn; parked_at: for a prerequisite.
-- line follows from the rest: where a delivery is found by its entity. A letter in front parts those in the line (l) from the
-- one that is under way (r) and from what is parked (p), so that nobody walks through a crowd to find one of the others; what
-- is over has null.
ALTER TABLE oncehook_deliveries
  ADD COLUMN entity     VARBINARY(255),
  ADD COLUMN version    BIGINT,
  ADD COLUMN blocked_at BIGINT,
  ADD COLUMN parked_at  BIGINT,
  MODIFY COLUMN cause ENUM('destination', 'handler', 'ours', 'poison', 'prerequisite') CHARACTER SET ascii COLLATE ascii_bin,
  ADD COLUMN line       VARBINARY(256) GENERATED ALWAYS AS
             (CASE state WHEN 'ready' THEN CONCAT('l', entity) WHEN 'retrying' THEN CONCAT('l', entity) WHEN 'dead' THEN CONCAT('l', entity)
                         WHEN 'running' THEN CONCAT('r', entity) WHEN 'parked' THEN CONCAT('p', entity) END) STORED,
  ADD KEY oncehook_deliveries_line (line, route, version, event, epoch);
