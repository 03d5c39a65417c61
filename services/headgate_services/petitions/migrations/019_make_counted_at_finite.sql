-- "Never counted" becomes a finite time: before PostgreSQL 17, '-infinity' cannot be subtracted from a timestamp.

ALTER TABLE petition_queue ALTER COLUMN counted_at SET DEFAULT 'epoch';
UPDATE petition_queue SET counted_at = 'epoch' WHERE counted_at = '-infinity';
