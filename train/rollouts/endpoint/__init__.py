"""An endpoint that speaks as OpenAI's does, for programs that run episodes against the policy."""
