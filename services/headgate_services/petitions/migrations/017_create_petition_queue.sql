-- How many petitions wait: counted now and then, and added to by every petition since, in the petition's own transaction.
--
-- So no more than the threshold are ever taken in, by any number of instances, although the petitions themselves are
-- counted at most once per PETITION_QUEUE_CACHE_TTL. The figure is never too low: what leaves the queue is only noticed
-- by the next count.

CREATE TABLE IF NOT EXISTS petition_queue (
    id BOOLEAN PRIMARY KEY DEFAULT TRUE CHECK (id),
    depth BIGINT NOT NULL DEFAULT 0,
    counted_at TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT '-infinity'
);

INSERT INTO petition_queue DEFAULT VALUES ON CONFLICT DO NOTHING;
