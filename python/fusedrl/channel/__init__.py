"""The weight channel: complete versions of a model's weights in shared memory."""
