-- Inboxes, threads, messages and attachments.
-- The same file serves SQLite and PostgreSQL: SQLite stores text and bytes unchanged, whatever type a column declares.

CREATE TABLE inboxes (
    id TEXT NOT NULL PRIMARY KEY,
    email_address TEXT NOT NULL,
    name TEXT NOT NULL,
    provider_config JSON NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE NOT NULL
);

-- Mail servers treat Ann@example.org and ann@example.org as the same inbox.
CREATE UNIQUE INDEX inboxes_email_address ON inboxes (lower(email_address));

CREATE TABLE threads (
    id TEXT NOT NULL PRIMARY KEY,
    inbox_id TEXT NOT NULL,
    subject TEXT NOT NULL,
    summary TEXT,
    last_message_at TIMESTAMP WITH TIME ZONE NOT NULL,
    participant_hash TEXT NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE NOT NULL,
    FOREIGN KEY (inbox_id) REFERENCES inboxes (id) ON DELETE CASCADE
);

CREATE INDEX threads_inbox ON threads (inbox_id, last_message_at);

CREATE TABLE messages (
    id TEXT NOT NULL PRIMARY KEY,
    thread_id TEXT NOT NULL,
    inbox_id TEXT NOT NULL,
    direction TEXT NOT NULL,
    status TEXT NOT NULL,
    error TEXT,
    provider_message_id TEXT,
    message_id TEXT NOT NULL,
    in_reply_to TEXT,
    reference_ids JSON NOT NULL,
    subject TEXT NOT NULL,
    from_address TEXT NOT NULL,
    to_addresses JSON NOT NULL,
    cc_addresses JSON NOT NULL,
    bcc_addresses JSON NOT NULL,
    reply_to_addresses JSON NOT NULL,
    text TEXT NOT NULL,
    html TEXT,
    labels JSON NOT NULL,
    size BIGINT NOT NULL,
    timestamp TIMESTAMP WITH TIME ZONE NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE NOT NULL,
    FOREIGN KEY (thread_id) REFERENCES threads (id) ON DELETE CASCADE,
    FOREIGN KEY (inbox_id) REFERENCES inboxes (id) ON DELETE CASCADE
);

CREATE INDEX messages_thread ON messages (thread_id, timestamp);

CREATE INDEX messages_inbox ON messages (inbox_id, timestamp);

CREATE INDEX messages_message_id ON messages (inbox_id, message_id);

CREATE TABLE attachments (
    id TEXT NOT NULL PRIMARY KEY,
    message_id TEXT NOT NULL,
    filename TEXT NOT NULL,
    content_type TEXT NOT NULL,
    disposition TEXT NOT NULL,
    content_id TEXT,
    size BIGINT NOT NULL,
    content BYTEA NOT NULL,
    FOREIGN KEY (message_id) REFERENCES messages (id) ON DELETE CASCADE
);

CREATE INDEX attachments_message ON attachments (message_id);
