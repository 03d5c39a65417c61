-- The number of waiting petitions: counted at most once per PETITION_QUEUE_CACHE_TTL, and incremented by every petition in
-- its transaction.
--
-- So any number of instances together accept no more than the threshold. The number is never too low: petitions that leave
-- the queue are subtracted only by the next count.

CREATE TABLE IF NOT EXISTS petition_queue (
    id BOOLEAN PRIMARY KEY DEFAULT TRUE CHECK (id),
    depth BIGINT NOT NULL DEFAULT 0,
    counted_at TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT '-infinity'
);

INSERT INTO petition_queue DEFAULT VALUES ON CONFLICT DO NOTHING;
