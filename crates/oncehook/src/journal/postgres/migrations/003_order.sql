-- The order of an entity's events.

-- Which version of its entity an event tells about, as the provider counts.
ALTER TABLE oncehook.events ADD COLUMN version bigint;

-- The newest version that took effect. (version counts effects, last_at is the newest time.) The row of (route, entity) is
-- also the lock under which workers decide whose turn it is.
ALTER TABLE oncehook.entities ADD COLUMN newest bigint;

-- entity and version stand here where a route of the event's source looks at them, and at parked ones. What waits for its turn
-- has no due time: run_at is the largest number.
ALTER TABLE oncehook.deliveries
  ADD COLUMN entity     text COLLATE "C",
  ADD COLUMN version    bigint,
  ADD COLUMN blocked_at bigint, -- since when it has waited for its turn
  ADD COLUMN parked_at  bigint, -- since when it has waited for a prerequisite
  DROP CONSTRAINT deliveries_cause,
  ADD CONSTRAINT deliveries_cause CHECK (cause IN ('destination', 'handler', 'ours', 'poison', 'prerequisite'));

-- The line of an entity on a route: everybody who stands in it, in order.
CREATE INDEX deliveries_line ON oncehook.deliveries (route, entity, version NULLS FIRST, event, epoch)
 WHERE entity IS NOT NULL AND state IN ('ready', 'retrying', 'running', 'dead');

-- Whether one of an entity is under way.
CREATE INDEX deliveries_busy ON oncehook.deliveries (route, entity) WHERE entity IS NOT NULL AND state = 'running';

-- What waits for a prerequisite: by when it is looked at again, and by the entity whose next success wakes it.
CREATE INDEX deliveries_parked ON oncehook.deliveries (route, run_at) WHERE state = 'parked';
CREATE INDEX deliveries_parked_entity ON oncehook.deliveries (entity) WHERE state = 'parked';

-- What waits for its turn, the longest first.
CREATE INDEX deliveries_blocked ON oncehook.deliveries (route, blocked_at)
 WHERE blocked_at IS NOT NULL AND state IN ('ready', 'retrying');
