-- Users with their tier, and the keys by which they are known. Understood by SQLite and PostgreSQL alike.

CREATE TABLE IF NOT EXISTS tier_users (
    id TEXT NOT NULL PRIMARY KEY,
    tier TEXT NOT NULL
);

-- Of a key only the digest is kept. Times are microseconds since the epoch.
CREATE TABLE IF NOT EXISTS tier_keys (
    id TEXT NOT NULL PRIMARY KEY,
    digest TEXT NOT NULL UNIQUE,
    user_id TEXT NOT NULL REFERENCES tier_users (id),
    created_at BIGINT NOT NULL,
    revoked_at BIGINT
);
