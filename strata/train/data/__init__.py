"""From files of text, chats and preferences to the packed batches of any step on any rank."""
