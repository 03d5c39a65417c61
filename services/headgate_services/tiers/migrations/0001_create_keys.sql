-- Users with their tiers, and their API keys; for SQLite and PostgreSQL.

CREATE TABLE IF NOT EXISTS tier_users (
    id TEXT NOT NULL PRIMARY KEY,
    tier TEXT NOT NULL
);

-- Only the digest of a key is stored. Times are in microseconds since the epoch.
CREATE TABLE IF NOT EXISTS tier_keys (
    id TEXT NOT NULL PRIMARY KEY,
    digest TEXT NOT NULL UNIQUE,
    user_id TEXT NOT NULL REFERENCES tier_users (id),
    created_at BIGINT NOT NULL,
    revoked_at BIGINT
);
