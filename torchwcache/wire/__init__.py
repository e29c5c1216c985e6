"""The wire protocol: messages, frames with file descriptors, the client."""
