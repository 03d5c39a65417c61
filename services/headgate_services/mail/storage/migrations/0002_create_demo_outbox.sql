-- E-mails in the outbox of the demo provider.

CREATE TABLE demo_outbox (
    id TEXT NOT NULL PRIMARY KEY,
    sent_at TIMESTAMP WITH TIME ZONE NOT NULL,
    from_address TEXT NOT NULL,
    to_addresses JSON NOT NULL,
    subject TEXT NOT NULL,
    body TEXT NOT NULL,
    message_id TEXT,
    in_reply_to TEXT,
    reference_ids JSON NOT NULL,
    attachment_names JSON NOT NULL
);

CREATE INDEX demo_outbox_sent_at ON demo_outbox (sent_at);
