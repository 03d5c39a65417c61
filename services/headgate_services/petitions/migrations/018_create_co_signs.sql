-- Co-signs: each identity once per petition.

CREATE TABLE IF NOT EXISTS petition_co_signs (
    id UUID PRIMARY KEY DEFAULT gen_random_uuid(),
    petition_id UUID NOT NULL REFERENCES petition_submissions (id) ON DELETE CASCADE,
    signer_id UUID NOT NULL,
    signed_at TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT uq_petition_co_sign UNIQUE (petition_id, signer_id)
);
