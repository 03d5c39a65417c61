"""The rate-limit service of Envoy: RLS v3 over gRPC, and `grpc.health.v1`. It needs the extra `headgate-server[envoy]`.

- `messages`: the message classes.
- `matching`: from the descriptors of a request to the rules that decide them. Pure.
- `answers`: from decisions to the response. Pure.
- `decisions`: one request: matched, decided in one round trip, answered.
- `service`: the gRPC server.
- `conversion`: from a configuration of envoyproxy/ratelimit to a policy file.
"""
