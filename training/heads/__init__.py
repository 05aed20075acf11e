"""What each kind of draft head is trained on: one method, one file. The heads themselves are drafter_service's."""
