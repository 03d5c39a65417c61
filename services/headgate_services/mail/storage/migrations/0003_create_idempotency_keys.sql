-- Requests that carried an Idempotency-Key, and the answer to each once there is one.

CREATE TABLE idempotency_keys (
    key TEXT NOT NULL PRIMARY KEY,
    fingerprint TEXT NOT NULL,
    response JSON,
    created_at TIMESTAMP WITH TIME ZONE NOT NULL
);

CREATE INDEX idempotency_keys_created_at ON idempotency_keys (created_at);
