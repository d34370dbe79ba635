"""What a rank of tp has of a module besides plain halves of its weights."""
