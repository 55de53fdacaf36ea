"""What every route rests on: errors in one form, middleware, who asks, bodies and streams of events."""
