"""What several recipes need: tiny models to try them on, chats in blocks of tokens, checkpoints without weights."""
