-- Where in its span a mark is true (search.rs): a bit for each of 32 slots of 128 milliseconds, the lowest for the first. What was
-- marked without saying so may be anywhere.
ALTER TABLE oncehook_marks ADD COLUMN slots INT UNSIGNED NOT NULL DEFAULT 4294967295;
